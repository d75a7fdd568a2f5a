"""The classes that a configuration file fills, one module for each table, and the facts of what they choose from."""
