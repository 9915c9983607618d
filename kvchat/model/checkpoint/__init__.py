"""A checkpoint in any format: where it is, its text files, its digest and its tensors."""
