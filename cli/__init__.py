"""What a person types: one file per sub-command."""
