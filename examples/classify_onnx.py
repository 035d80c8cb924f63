"""Classify images by an exported model: python classify_onnx.py model.onnx cat.png ...

It prints the probability of each class, and needs onnxruntime, numpy and Pillow, but not this
project: what the numbers mean is in the file.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
stored = session.get_modelmeta().custom_metadata_map
info = {name: json.loads(value) for name, value in stored.items()}


def classify(path: str) -> dict[str, float]:
    """The probability of each class for an image of 8 or 16 bits, as --predict computes it."""
    size, image = info["size"], Image.open(path)
    image.draft(None, (2 * size, 2 * size))  # decodes a JPEG file at a smaller scale
    image = ImageOps.exif_transpose(image)
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    image = image.crop((left, top, left + side, top + side))
    if image.mode.startswith("I"):  # grey of 16 bits
        grey = np.array(image)
        grey[grey == image.info.get("transparency")] = 65_535  # white
        image = Image.fromarray((grey / 257).round().astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    image = image.convert("RGB" if info["channels"] == 3 else "L")
    image = image.resize((size, size), Image.Resampling[info["interpolation"].upper()])
    pixels = np.array(image, dtype=np.float32) / 255
    pixels = (pixels.reshape(size, size, -1) - info["mean"]) / info["std"]
    inputs = pixels.transpose(2, 0, 1)[None].astype(np.float32)
    [logits] = session.run(None, {session.get_inputs()[0].name: inputs})
    probabilities = np.exp(logits[0] - logits[0].max())
    probabilities /= probabilities.sum()
    if "output" in info:  # of several labels
        probabilities = 1 / (1 + np.exp(-logits[0]))
    return {name: float(p) for name, p in zip(info["classes"], probabilities)}


if __name__ == "__main__":
    for path in sys.argv[2:]:
        print(path, classify(path))
