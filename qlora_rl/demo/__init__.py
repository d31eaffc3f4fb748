"""A small, real task for the demo, the tests and the benchmarks: two-digit addition and a model pretrained on it."""
