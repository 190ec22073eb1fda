"""Other trainers with our rollouts and losses: TRL. Imports training and what is below it; nothing imports this."""
