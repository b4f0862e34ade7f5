"""`memopt run`: profile, advise and apply in one process and one run of the script."""
