"""The speed of matrix products on a device: as its data sheet states it, and as measured."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

PEAK_TERAFLOPS: Mapping[str, float] = {
    "GB200": 2500,
    "B200": 2250,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H200 NVL": 835,
    "H200": 989,
    "H20": 148,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10": 125,
    "MI300X": 1307,
}
"""Dense BFloat16 TFLOP/s of devices whose name (`torch.cuda.get_device_name`) contains the word; the first match
counts. From the makers' data sheets: NVIDIA GB200 NVL72 (36 superchips of two GPUs: 360 PFLOP/s with sparsity for 72),
DGX B200 (4.5 PFLOP/s with sparsity per GPU), H100 (1,979, NVL 1,671, PCIe 1,513 with sparsity), H200 (as H100; NVL
1,671), H20 (148), A100 (312), L40S (362), L4 (242 with sparsity), A10 (125); AMD Instinct MI300X (1,307.4)."""
PRODUCT_SIZE = {"cpu": 512, "cuda": 8192}
NUM_PRODUCTS = 20


def stated_peak(device_name: str) -> float | None:
    """Operations per second according to the data sheet; None for a device that the table does not contain."""
    return next((1e12 * value for word, value in PEAK_TERAFLOPS.items() if word in device_name), None)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the product of two large random square matrices; the best of several runs."""
    size = PRODUCT_SIZE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(NUM_PRODUCTS):
        synchronize(device)
        started = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
