"""The checks of an emulated GPU, one function each; ``plan`` puts them in order."""
