"""Slots with fewer bits than the model computes with: fp8 with the constant scale 1, int8 with scales inline.

    fp8    | K | V |                                 saturated at the largest number; a NaN stays one
    int8   | K | V | scale of K | scale of V |       of this token and KV head, in float32

A latent and its rotary key take the places of K and V. The int8 scale is the largest magnitude of the vector
divided by 127, as with vLLM's "int8_per_token_head" (`vllm/config/cache.py`, CacheDType).

Error of a number x: with int8 at most 1/254 of its vector's largest magnitude; with fp8 e4m3 at most |x| / 16
up to 448, and 2^-10 below 2^-6; with e5m2 at most |x| / 8 up to 57,344, and 2^-17 below 2^-14.
"""

import torch

INT8_LARGEST = 127.0


def quantise(k_THD: torch.Tensor, v_THD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Slots `[T, H, C]` of a cache of this dtype: float8_e4m3fn, float8_e5m2 or int8."""
    if dtype != torch.int8:
        largest = torch.finfo(dtype).max
        return torch.cat((k_THD, v_THD), dim=-1).clamp(-largest, largest).to(dtype)
    vectors = (k_THD.float(), v_THD.float())
    # Not below the smallest normal number, so that a vector of zeros can be divided.
    least = torch.finfo(torch.float32).tiny
    scales = [(x.abs().amax(dim=-1, keepdim=True) / INT8_LARGEST).clamp_min(least) for x in vectors]
    numbers = [
        (x / scale).round_().clamp_(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
        for x, scale in zip(vectors, scales, strict=True)
    ]
    return torch.cat((*numbers, torch.cat(scales, dim=-1).view(torch.int8)), dim=-1)


def dequantise(slots: torch.Tensor, key_size: int, slot_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers `[..., slot_size]` in `dtype` of slots `[..., C]`. K, or the latent, has `key_size` of them."""
    if slots.dtype != torch.int8:
        return slots.to(dtype)
    numbers, scales = slots[..., :slot_size].float(), slots[..., slot_size:].view(torch.float32)
    numbers[..., :key_size] *= scales[..., :1]
    numbers[..., key_size:] *= scales[..., 1:]
    return numbers.to(dtype)
