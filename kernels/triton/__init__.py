"""The backend for GPUs: Triton kernels, and flash-attn where it is installed."""
