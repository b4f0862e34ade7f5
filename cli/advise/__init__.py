"""`memopt advise`: the command, one file for each of its verbs, its words and tables."""
