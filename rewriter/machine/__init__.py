"""Machine profiles: measured ones, and presets from data sheets."""
