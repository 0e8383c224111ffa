"""What will fit and how fast it can be, before anything is loaded or even downloaded."""
