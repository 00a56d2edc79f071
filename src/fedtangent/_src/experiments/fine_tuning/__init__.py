"""Fine-tuning of pre-trained networks, today's main use of the theory of networks that stay close to linear."""
