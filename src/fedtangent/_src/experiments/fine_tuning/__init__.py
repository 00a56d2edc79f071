"""Fine-tuning of pre-trained networks, where the kernel regime is used today."""
