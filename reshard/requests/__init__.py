"""What is asked and planned: requests, plan files, and planning as a row of steps."""
