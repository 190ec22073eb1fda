"""Studies of methods rather than single runs: comparisons at equal cost, audits of likelihood estimators and
of credit rules, cost estimates. Imports training and what is below it, not sft or integrations.
"""
