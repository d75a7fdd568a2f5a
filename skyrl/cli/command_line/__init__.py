"""What all commands share: words of a command line, classes of commands, options of services, missing packages."""
