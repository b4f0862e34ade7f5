"""The script of a fake run: its process, its files, its loaders, its compilers, and when it has been followed far enough."""
