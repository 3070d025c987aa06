"""The command line. A command's file imports what it needs when it is called, so that `fullband --help` answers at once."""
