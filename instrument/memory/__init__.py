"""What memory there is and what is taken: allocators' events and statistics, meters, the host's room."""
