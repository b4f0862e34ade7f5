"""`memopt advise`: the command, its words and tables, and what its options lead to."""
