"""Base layers in 4 bits, as bitsandbytes has them."""
