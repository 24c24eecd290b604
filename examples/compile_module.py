"""Run any module with its weights streamed from disk, by torch.compile: python examples/compile_module.py"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch: spinning threads take the core the disk reader needs

import torch

import forebay


def main() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval()  # 18 MB
    x = torch.randn(2, 32, 256)
    with torch.no_grad():
        wanted = model(x)
        compiled = torch.compile(model, backend="forebay", options={"budget": "8MiB", "strict": True})
        found = compiled(x)
    print(f"largest difference from eager: {float((found - wanted).abs().max()):.1e}")
    print(forebay.offload_report(model))


if __name__ == "__main__":
    main()
