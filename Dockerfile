# The scripts and the commands faster-images and faster-texts; torch brings its CUDA libraries.
#   docker build -t faster-training .
#   docker run --gpus all --ipc=host -v $PWD:/work faster-training --dataset digits --epochs 2
FROM python:3.12-slim
WORKDIR /faster-training
COPY . .
RUN pip install --no-cache-dir '.[train]'
ENV PYTHON=python3
WORKDIR /work
ENTRYPOINT ["faster-images"]
