"""Where metrics and samples go: console, files and trackers."""
