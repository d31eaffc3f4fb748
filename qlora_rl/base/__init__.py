"""The frozen 4-bit model: how it is quantised once, stored, and loaded. The only package that imports bitsandbytes."""
