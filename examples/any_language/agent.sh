#!/bin/sh
# An agent in a shell script. The task is on its standard input, as JSON; the model is where SDKs look for it; the last
# line is the reward: 1 for an even number.
task=$(cat)
answer=$(curl -sf "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
    -d "{\"model\": \"$OPENAI_MODEL\", \"max_tokens\": 8, \"messages\": [{\"role\": \"user\", \"content\": $task}]}" |
    sed -n 's/.*"content": *"\([^"]*\)".*/\1/p') || exit 1
case $answer in
    *[02468]) echo 1 ;;
    *) echo 0 ;;
esac
