"""Where metrics go: terminal, files and dashboards; in the process that logs."""

from embodied.logger.jsonl import JSONLOutput
from embodied.logger.logger import Logger, StepCount, rewind
from embodied.logger.output import AsyncOutput, MissingPackageError, Output, Summary
from embodied.logger.scope import ScopeOutput
from embodied.logger.tensorboard import TensorBoardOutput
from embodied.logger.terminal import TerminalOutput
from embodied.logger.wandb import WandbOutput

__all__ = [
    "AsyncOutput",
    "JSONLOutput",
    "Logger",
    "MissingPackageError",
    "Output",
    "ScopeOutput",
    "StepCount",
    "Summary",
    "TensorBoardOutput",
    "TerminalOutput",
    "WandbOutput",
    "rewind",
]
