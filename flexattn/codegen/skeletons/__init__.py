"""Kernel skeletons: ordinary Triton functions that take the user's functions as constexpr arguments."""
