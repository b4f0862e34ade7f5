"""May the optimizer step inside backward, or in pieces? What the script does with gradients, read and watched."""
