"""What kernels take beside their results: workspaces, temporaries and scratch, asked of the kernel or by formula."""
