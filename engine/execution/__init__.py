"""Execution of one step on the device: block tables, the forward pass, CUDA graphs, sampling."""
