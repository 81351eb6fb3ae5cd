"""What tests share: each file is called after what it gives."""
