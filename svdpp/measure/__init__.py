"""What is asked of machines and models before a run, and what is made of what a run left behind."""
