"""Tiers: cached pages that left the device, or never were on it, in host memory and in page stores."""
