"""`apply --verify`: a plain and an enforced run of the script, each in a process of its own, compared bit for bit."""
