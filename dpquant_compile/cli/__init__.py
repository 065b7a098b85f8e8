"""The command line, `dpquant`: `main` has the entry point, each command is a file."""
