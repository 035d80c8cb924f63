"""Serve an exported image classifier: python serve_onnx.py model.onnx [PORT]

    curl --data-binary @cat.png http://localhost:8000

answers with the probability of each class. It needs onnxruntime, numpy and Pillow, and nothing of
this project: what the numbers mean is in the file.
"""

import io
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
stored = session.get_modelmeta().custom_metadata_map
info = {name: json.loads(value) for name, value in stored.items()}


def classify(content: bytes) -> dict[str, float]:
    """The probability of each class for an image file's content, as --predict computes it."""
    size = info["size"]
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    image = image.convert("RGB" if info["channels"] == 3 else "L")
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), Image.Resampling[info["interpolation"].upper()])
    pixels = np.array(image.crop((left, top, left + size, top + size)), dtype=np.float32) / 255
    pixels = (pixels.reshape(size, size, -1) - info["mean"]) / info["std"]
    inputs = pixels.transpose(2, 0, 1)[None].astype(np.float32)
    [logits] = session.run(None, {session.get_inputs()[0].name: inputs})
    probabilities = np.exp(logits[0] - logits[0].max())
    probabilities /= probabilities.sum()
    return {name: float(p) for name, p in zip(info["classes"], probabilities)}


class Handler(BaseHTTPRequestHandler):
    """Answers the upload of an image with JSON."""

    def do_POST(self):
        length = self.headers["Content-Length"]
        try:
            if length is None:
                status, answer = 411, {"error": "give Content-Length"}
            else:
                status, answer = 200, classify(self.rfile.read(int(length)))
        except OSError as error:  # not an image
            status, answer = 400, {"error": str(error)}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


if __name__ == "__main__":
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 8000
    HTTPServer(("localhost", port), Handler).serve_forever()
