"""What travels from which rank to which, and as one rank sees it."""
