"""What notebooks run on their ranks: models to time, recorded steps, and the predictions beside them."""
