"""The live LoRA: what it is fit for, its canonical form, and its versions on disk. The only package that imports
PEFT."""
