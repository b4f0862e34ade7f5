"""What commands share: the console, configuration, devices by name, ranks, and files of our own."""
