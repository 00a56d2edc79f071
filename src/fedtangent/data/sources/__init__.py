"""TensorFlow Datasets builders that prepare array_record without TensorFlow. Import them lazily: each needs TFDS."""
