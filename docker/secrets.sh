#!/usr/bin/env bash
# Makes the secrets that docker-compose.yml names, one a file, with random passwords. What is there already stays.
#
#   docker/secrets.sh [FOLDER]        # ./secrets, or PREREAD_SECRETS
set -euo pipefail
folder=${1:-${PREREAD_SECRETS:-./secrets}}

# Containers run as several users, who all have to read them: the folder is what keeps others of this machine away.
mkdir -p "$folder"
chmod 700 "$folder"

random() {
    head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n'
}

keep() {
    local path=$folder/$1
    if [ ! -s "$path" ]; then
        printf '%s\n' "$2" >"$path.new"
        chmod 444 "$path.new"
        mv "$path.new" "$path"
        echo "made $path"
    fi
}

keep postgres_password "$(random)"
keep redis_conf "requirepass $(random)"
keep aws_access_key_id "preread-$(random | cut -c 1-12)"
keep preread_admin_key "key_$(random | cut -c 1-16).$(random)$(random)"
keep aws_secret_access_key "$(random)"

postgres=$(cat "$folder/postgres_password")
redis=$(sed -n 's/^requirepass //p' "$folder/redis_conf")
keep preread_database_url "postgresql://preread:$postgres@postgres:5432/preread"
keep preread_redis_url "redis://:$redis@redis:6379/0"
keep preread_fleet_url "redis://:$redis@redis:6379/1"
