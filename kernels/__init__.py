"""CuTe DSL kernels, one family a file. Importing a family imports the compiler."""
