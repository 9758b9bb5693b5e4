"""Code generation: programs and facts about one call in, kernel source out; needs no GPU and imports triton only in skeletons."""
