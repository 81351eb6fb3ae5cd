"""The commands, one file each. main.py lists them in a static table and loads a file when its command is called."""
