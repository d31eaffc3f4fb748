"""The frozen 4-bit model: how it is quantised once, stored, and loaded. The only room that knows bitsandbytes."""
