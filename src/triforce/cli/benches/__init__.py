"""The parts of `triforce bench`, a file each: from arguments to rows, and from rows to a terminal."""
