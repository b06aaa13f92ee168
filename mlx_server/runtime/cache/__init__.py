"""What layers keep between steps: K/V, recurrent states, and their pools."""
