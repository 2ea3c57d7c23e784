"""Where metrics go: terminal, files and dashboards."""
