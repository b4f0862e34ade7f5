"""Values that were never computed: what stays real, what is guessed, what is known of a result all the same."""
