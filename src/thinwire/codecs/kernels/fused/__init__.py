"""Kernels in Triton: several passes of a codec in one. Import them where ``triton_calls.there()`` says so."""
